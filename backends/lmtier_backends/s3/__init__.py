"""Objects in a bucket: Amazon S3, or any server that speaks its protocol."""
