"""The loop over time: one kernel for each way to split it over the multiprocessors of a GPU."""
