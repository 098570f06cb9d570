"""What a benchmark reads of the moments that the processes of a traced pool note."""
