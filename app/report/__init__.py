"""The run report: one page that opens offline."""
