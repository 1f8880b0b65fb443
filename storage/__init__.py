"""Decision, catalog, shards and their actors. Knows neither the workers nor the app; no torch in it."""
