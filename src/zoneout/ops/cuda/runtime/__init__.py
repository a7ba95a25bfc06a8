"""What the kernels run on: the compiler, kernel launches, streams and BLAS."""
