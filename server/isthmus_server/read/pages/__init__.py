"""Pages of HTML: what all of them share, the report of a run, and that of a comparison."""
