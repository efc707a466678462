"""Terminal output of programs, sub-commands and hosts: errors, tables, plans, training flags."""
