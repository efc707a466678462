"""What programs, sub-commands of packages and hosts share on a terminal: errors, tables, training flags."""
