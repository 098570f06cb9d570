"""Launchers start, watch and stop workers: `base` is the interface, `local` runs them as child processes of this host."""
