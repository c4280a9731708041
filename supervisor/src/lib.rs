//! The supervisor of a turnhost.

pub mod core;
