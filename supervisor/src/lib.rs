#![doc = include_str!("../README.md")]
//!
//! # Rooms
//!
//! [`core`] is pure and knows nothing of the others. `driver` is the loop around it; it uses `child`
//! (one process), [`registry`] (its record and the lock) and `transport` (bytes that never wait).
//! [`relay`] and [`supervisor`] put the loop between a gateway's pipes, or into a program, whose own code
//! waits in `jobs`. [`reap`]
//! and [`status`] stand alone on a home. [`replay`] plays transcripts against a host and records
//! them; it knows a host only as a child process with three pipes.

mod child;
pub mod core;
mod driver;
mod environment;
mod jobs;
mod late;
pub mod log;
pub mod reap;
pub mod registry;
pub mod relay;
pub mod replay;
mod session;
pub mod status;
pub mod supervisor;
mod transport;

pub use child::default_host;
pub use environment::EnvFlag;
pub use supervisor::HostSupervisor;
