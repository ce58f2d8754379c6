"""AdamW on the split master, on the host and on the device, and the actors that apply it."""
