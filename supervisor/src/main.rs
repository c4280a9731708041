//! The supervisor.

fn main() {}
