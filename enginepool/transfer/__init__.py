"""How the bytes of new weights travel, and how they are verified. Needs torch."""
