"""Pipeline: sends and receives between positions, and the batch on its first and last one."""
