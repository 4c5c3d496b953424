"""The composition root: reads the facts, makes the plan, and starts a job. One module for each way
to start one."""
