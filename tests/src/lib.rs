//! Drives real turnhost processes over real pipes.
