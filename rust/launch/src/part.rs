//! The ranks of one host as a part of a job, by the launcher that another one started for them.
//!
//! `hosts.rs` starts `unisono launch --part-of-job` on each host, over ssh, and writes an [`Order`] to its standard input, and
//! signals to pass on. The end of the input is the end of the job, whatever ended it: a rank on another host, the launcher that
//! wrote the order, its host, or the connection. So nothing that was started on a host outlives the job.
//!
//! A part that has its order prints the port at which all ranks meet before anything else. The part with rank 0 chooses that
//! port, unless the order names one.

use std::io::{self, BufRead, BufReader, Write};
use std::num::NonZeroU16;
use std::process::Stdio;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use signal_hook::consts::{SIGTERM, SIGTSTP};

use crate::environment::Reservation;
use crate::front;
use crate::order::{Order, port_line, split};
use crate::processes;
use crate::report::{self, say};
use crate::role::{Door, KEEPER, again};
use crate::signals::{self, Caught, Event};

/// Between requests to end at once.
const REQUEST_PAUSE: Duration = Duration::from_millis(20);

/// Starts what the order at the standard input says, and returns the status to exit with.
pub(crate) fn run(door: &Door) -> u8 {
    start(door).unwrap_or_else(|error| {
        say(&format!("cannot start ranks on this host: {error}"));
        1
    })
}

fn start(door: &Door) -> io::Result<u8> {
    signals::survive_closed_pipes()?;
    let mut input = BufReader::new(io::stdin());
    if input.fill_buf()?.is_empty() {
        // The job ended before it came to this host.
        return Ok(0);
    }
    let mut order = Order::read(&mut input)?;
    report::speak_of(&order.part.host);
    std::env::set_current_dir(&order.folder).map_err(|error| {
        let folder = order.folder.display();
        io::Error::new(error.kind(), format!("no folder {folder}: {error}"))
    })?;
    // Kept from other programs until the job has ended.
    let mut _port = None;
    if order.part.first == 0 {
        let port = Reservation::new(NonZeroU16::new(order.part.port))?;
        order.part.port = port.port;
        _port = Some(port);
    }
    // On a line of its own, whatever the login has printed.
    let mut out = io::stdout();
    write!(out, "\n{}", port_line(order.part.port))?;
    out.flush()?;
    let caught = Caught::new()?;
    // Where that cannot be, the keeper says so.
    let _ = processes::adopt_orphans();
    let mut command = again(door, KEEPER);
    command
        .arg("--part")
        .args(&order.arguments)
        .stdin(Stdio::piped());
    for variable in &order.variables {
        if let Some((name, value)) = split(variable) {
            command.env(name, value);
        }
    }
    let mut keeper = front::spawn(&mut command)?;
    if let Some(mut told) = keeper.stdin.take() {
        // A keeper that has ended says why.
        let _ = order.part.write(&mut told);
    }
    let (events, grace) = (caught.sender(), order.grace);
    thread::Builder::new()
        .name("lifeline".to_owned())
        .spawn(move || obey(input, &events, grace))?;
    front::pass_on_signals(keeper, &caught)
}

/// Passes on what the launcher of the job asks for, and ends the ranks when it asks for no more.
fn obey(input: impl BufRead, events: &Sender<Event>, grace: Duration) {
    // The receiver goes when the ranks have ended.
    let pass_on = |signal| events.send(Event::Signal(signal)).is_ok();
    for line in input.lines().map_while(Result::ok) {
        let signal = line
            .strip_prefix("signal ")
            .and_then(|text| text.parse().ok());
        // One that stops would stop this thread too, and with it what continues.
        if let Some(signal) = signal.filter(|&signal| signal != SIGTSTP)
            && !pass_on(signal)
        {
            return;
        }
    }
    if pass_on(SIGTERM) {
        thread::sleep(grace);
        // The third request that is seen kills; of two that come at the same moment the kernel delivers one.
        while pass_on(SIGTERM) {
            thread::sleep(REQUEST_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_the_input_ends_the_ranks() {
        let (events, seen) = std::sync::mpsc::channel();
        let asks = &b"signal 10\nnonsense\nsignal 20\n"[..];
        let obeys = thread::spawn(move || obey(asks, &events, Duration::ZERO));
        let first: Vec<Event> = seen.iter().take(4).collect();
        assert_eq!(first, [10, 15, 15, 15].map(Event::Signal));
        // The ranks have ended.
        drop(seen);
        obeys.join().expect("it ends");
    }
}
