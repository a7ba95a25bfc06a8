"""The work around the loop over time: row layout, large products, recomputing."""
