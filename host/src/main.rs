//! The compute host.

fn main() {}
