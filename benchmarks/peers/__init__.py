"""Other people's kernels, called as their own library calls them."""
