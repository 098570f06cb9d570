"""Who starts workers, watches them and stops them. Today: `local`, as child processes."""
