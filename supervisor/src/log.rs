//! The log of the program, on stderr.
//!
//! Invariant: a reader of stderr that stops reading holds nothing up; lines that it does not take
//! are lost.

use std::io::{self, Write};
use std::os::fd::AsFd;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::transport::write_now;

/// Starts the log. `TURNHOST_LOG` sets what is logged, as `RUST_LOG` does elsewhere.
pub fn init() {
    let filter = EnvFilter::try_from_env("TURNHOST_LOG")
        .or_else(|_| EnvFilter::try_from_default_env())
        .unwrap_or_else(|_| EnvFilter::new("info"));
    // A second start, in a test, keeps the first log.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Stderr)
        .with_ansi(false)
        .with_target(false)
        .try_init();
}

#[derive(Clone, Copy)]
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Whatever is not taken now is dropped, the rest of a half line included.
        let stderr = io::stderr();
        let mut rest = bytes;
        while !rest.is_empty() {
            match write_now(stderr.as_fd(), rest) {
                Ok(count) => rest = &rest[count..],
                Err(_) => break,
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Stderr {
    type Writer = Self;

    fn make_writer(&self) -> Self::Writer {
        *self
    }
}
