"""Every private or alpha symbol of Ray, Serve and uvicorn that ray-slo needs."""
