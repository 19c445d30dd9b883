"""Policy losses, one file each: the file's stem is the option `policy_loss=<stem>`, the results column and the legend."""
