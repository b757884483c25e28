"""`@ray_slo.batch`: batches by deadline inside one replica."""
