"""The parts of a step's order, of which `pipeline.schedule` makes the whole: operations, edges, groups, waves."""
