"""Where checkpoint-soak has its checkpoints: a directory, or a bucket of an S3 server with
faults."""
