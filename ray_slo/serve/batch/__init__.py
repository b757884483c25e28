"""`@ray_slo.batch`: deadlines inside one replica."""
