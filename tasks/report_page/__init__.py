"""The parts of the page that `tasks.report` makes: reading a run, thinning it out, laying out a step, writing HTML."""
