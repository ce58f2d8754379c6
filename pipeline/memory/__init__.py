"""What fits where: accounts of device, host and drive, and the search for the placement that uses them best. Pure."""
