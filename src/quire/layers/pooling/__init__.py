"""What stands on a trunk that gives vectors instead of tokens."""
