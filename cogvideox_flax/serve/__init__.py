"""A server of videos: an HTTP API and a page, front ends of the durable queue of `generate.jobs`."""
