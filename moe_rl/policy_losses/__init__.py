"""Policy losses, one file each: the file's stem is the option `policy_loss=<stem>`, results column and legend."""
