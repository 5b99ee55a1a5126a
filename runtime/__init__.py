"""Serving: plan loading, executor, scheduler, paged KV, sampling and the HTTP server. Needs no torch."""
