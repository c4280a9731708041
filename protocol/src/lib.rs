//! What a turnhost and its supervisor must agree on.
//!
//! No I/O loop, no thread, and nothing that only one of the two needs.

pub mod config;
pub mod file;
pub mod frame;
pub mod home;
pub mod idle;
pub mod json;
pub mod limits;
pub mod line;
pub mod look;
pub mod process;
pub mod route;
pub mod rpc;
pub mod signal;
