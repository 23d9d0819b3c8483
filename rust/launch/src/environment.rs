//! The variables of a rank, and the port at which the ranks meet.

use std::ffi::OsStr;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;
use std::process::Command;
use std::{env, thread};

use socket2::{Domain, Protocol, Socket, Type};

use crate::order::Part;

/// The variable with the secret of the job.
///
/// A variable, and not an inherited memfd: programs between the launcher and a rank, such as shells and Python's
/// `subprocess`, hand variables on and close descriptors. Only the same user and root can read the variables of a
/// process, as they can its memory. A launcher gives it to the ranks alone and does not have it itself.
const SECRET: &str = "UNISONO_LAUNCH_SECRET";

/// The ranks of this host, and what all ranks of a job share.
pub(crate) struct Environment<'a> {
    part: &'a Part,
    /// How many threads a rank may have without taking another's core.
    threads: usize,
}

impl<'a> Environment<'a> {
    pub(crate) fn new(part: &'a Part) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / usize::from(part.ranks)).max(1);
        Self { part, threads }
    }

    /// Gives the rank with this number on this host its variables.
    pub(crate) fn set(&self, local: u16, command: &mut Command) {
        let Self { part, threads } = self;
        command.env(SECRET, &part.secret);
        for (name, value) in [
            ("RANK", part.first + local),
            ("WORLD_SIZE", part.world),
            ("LOCAL_RANK", local),
            ("LOCAL_WORLD_SIZE", part.ranks),
            ("MASTER_PORT", part.port),
        ] {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", &part.master);
        for (name, value) in [("OMP_NUM_THREADS", *threads), ("PYTHONUNBUFFERED", 1)] {
            if env::var_os(name).is_none() {
                command.env(name, value.to_string());
            }
        }
        // This job may run inside a rank of torchrun, whose agent is not ours.
        for (name, _) in env::vars_os().filter(|(name, _)| is_of_torchrun(name)) {
            command.env_remove(name);
        }
    }
}

fn is_of_torchrun(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b"TORCHELASTIC_")
}

/// A free port, kept from others until the job has ended.
///
/// The socket is bound and never listens. The kernel does not give its port to a process that asks for any port, but a
/// process that names the port and sets SO_REUSEADDR, as stores do, can listen there.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) port: u16,
    _socket: Option<Socket>,
}

impl Reservation {
    /// Takes `port`, or any free one.
    pub(crate) fn new(port: Option<NonZeroU16>) -> io::Result<Self> {
        if let Some(port) = port {
            // A user who names a port is responsible for it being free.
            return Ok(Self {
                port: port.get(),
                _socket: None,
            });
        }
        let everywhere: [SocketAddr; 2] = [
            (Ipv6Addr::UNSPECIFIED, 0).into(),
            (Ipv4Addr::UNSPECIFIED, 0).into(),
        ];
        let socket = bind(everywhere[0]).or_else(|_| bind(everywhere[1]))?;
        let address = socket.local_addr()?.as_socket();
        let port = address
            .map(|address| address.port())
            .ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self {
            port,
            _socket: Some(socket),
        })
    }
}

fn bind(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM.cloexec(),
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_reserved_port_can_be_listened_at_by_name() {
        let reservation = Reservation::new(None).expect("a free port");
        // std sets SO_REUSEADDR.
        for address in ["127.0.0.1", "0.0.0.0"] {
            TcpListener::bind((address, reservation.port)).expect("the port is free");
        }
        let strict = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let address: SocketAddr = (Ipv4Addr::LOCALHOST, reservation.port).into();
        strict.bind(&address.into()).expect_err("the port is taken");
    }

    #[test]
    fn a_port_that_is_named_is_taken_as_it_is() {
        let reservation = Reservation::new(NonZeroU16::new(29400)).expect("no socket needed");
        assert_eq!(reservation.port, 29400);
    }

    #[test]
    fn variables_of_a_rank() {
        let alone = Part::alone(4, 1234).expect("random bytes");
        let second = Part {
            world: 6,
            first: 3,
            ranks: 3,
            master: "node1".to_owned(),
            ..alone.clone()
        };
        let names = [
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ];
        for (part, values) in [
            (alone, ["2", "4", "2", "4", "127.0.0.1", "1234"]),
            (second, ["5", "6", "2", "3", "node1", "1234"]),
        ] {
            let mut command = Command::new("true");
            Environment::new(&part).set(2, &mut command);
            for (name, value) in names.into_iter().zip(values) {
                assert_eq!(variable(&command, name).as_deref(), Some(value), "{name}");
            }
        }
    }

    fn variable(command: &Command, wanted: &str) -> Option<String> {
        let mut variables = command.get_envs();
        let (_, value) = variables.find(|(name, _)| *name == wanted)?;
        value?.to_str().map(str::to_owned)
    }

    #[test]
    fn the_ranks_of_a_job_have_a_secret_and_other_jobs_another() {
        let secret = |part: &Part, rank| {
            let mut command = Command::new("true");
            Environment::new(part).set(rank, &mut command);
            variable(&command, SECRET).expect("a secret")
        };
        let jobs = [(); 2].map(|()| Part::alone(2, 1234).expect("random bytes"));
        assert_eq!(secret(&jobs[0], 0), secret(&jobs[0], 1));
        assert_eq!(secret(&jobs[0], 0).len(), 64);
        assert_ne!(secret(&jobs[0], 0), secret(&jobs[1], 0));
        assert!(std::env::var_os(SECRET).is_none());
    }
}
