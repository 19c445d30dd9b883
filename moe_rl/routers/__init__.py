"""Router variants, one file each: the file's stem is the option `router=<stem>`, the results column and the legend."""
