//! The command `turnhost-supervisor`.

mod cli;
mod supervise;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
