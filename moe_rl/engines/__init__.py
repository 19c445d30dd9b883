"""Rollout engines, one file each: the file's stem is the option `engine=<stem>`."""
