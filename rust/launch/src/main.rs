//! The command `unisono`.

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::Command;
use unisono_launch::{Door, launch};

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    // The launcher reads its own arguments, which clap must not reorder: some belong to the program.
    if let Some((first, rest)) = arguments.split_first()
        && first == "launch"
    {
        return launch(rest, &Door::binary()).into();
    }
    Command::new("unisono")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Collective communication between the processes of one job")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(unisono_launch::command().name("launch"))
        .get_matches();
    ExitCode::SUCCESS
}
