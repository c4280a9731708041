//! The parent of one turnhost, and what belongs to its trade.
//!
//! [`replay`] plays transcripts against a host and records them. It knows a host only as a child
//! process with three pipes, so whatever speaks the frames on stdin and stdout can stand there.

mod child;
pub mod core;
mod driver;
mod environment;
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
