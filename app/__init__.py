"""Driver, command line and job specs."""
