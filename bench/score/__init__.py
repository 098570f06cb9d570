"""What `python -m bench.score_gpu` is made of: requests, the load that sends them, who answers, and what is seen meanwhile."""
