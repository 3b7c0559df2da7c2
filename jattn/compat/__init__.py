"""The names of other libraries, for programs that are ported from them."""
