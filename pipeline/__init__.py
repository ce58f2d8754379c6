"""What a training step is and what runs it: schedule, coordinator, layer templates, compute and optimizer actors."""
