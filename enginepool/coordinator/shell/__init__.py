"""What the coordinator does outside of itself: sockets, clock, journal and log."""
