"""The operators' page: the fleet in pictures, over HTTP, out of what AdminService shows."""
