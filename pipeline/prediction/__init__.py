"""How long a step takes on a machine that is described: prices of operations, simulation, the choice of placement."""
