//! When a peer's host is lost, and when a peer only does not run.
//!
//! The end of a process is announced by its kernel, and shows at once. A host that has lost its power or its cable
//! announces nothing, and a connection over which nothing goes never notices. So the kernel asks: a connection on which
//! nothing has come for a third of the limit is probed, and again every second or so, and when the limit is over without
//! an answer the connection ends. The peer's kernel answers by itself. A process that is stopped, swapped out, or held
//! in a debugger is therefore not lost, and nothing in either process wakes up for this.
//!
//! Bytes that are on their way put the probes off: then the kernel sends them again, for a quarter of an hour unless
//! `TCP_USER_TIMEOUT` says less. The control connection has that option. Hardly anything ever goes over it, so it finds
//! out about the host whatever the data does, and its end is the end of the link. The data connection must not have it:
//! Linux then also ends a connection whose receiver answers, but has had no room for that long, which is what a rank
//! looks like that computes, or is stopped, while its peer sends. Its probes serve for routers that forget connections
//! over which nothing goes. The same holds for stripes, which may go another way than the control connection: what is on
//! its way to a peer that does not read ends none of them, and a stripe's receiver probes it.
//!
//! Before there is a link the same holds: a host that does not answer the call for a connection is given up after the same
//! limit, and while the two sides introduce themselves both connections have both options.
//!
//! Beyond that there are questions ([`Control::ask`](crate::transport::control::Control::ask)). Not the kernel but a thread
//! of the peer's process answers them, which does nothing else meanwhile. They end nothing: a wait that has timed out reports
//! whether they were answered. They are asked only by a rank that has waited for a while, and so an idle process is woken by a
//! peer that waits for it, and otherwise sleeps.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

/// A connection's probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Probes {
    /// Seconds of silence before the first.
    idle: u32,
    /// Seconds from one to the next.
    interval: u32,
    /// How many must go without an answer.
    count: u32,
}

impl Probes {
    /// Those by which a host is lost after `limit` seconds, which are 2 to 3600.
    fn within(limit: u32) -> Self {
        let idle = (limit / 3).max(1);
        let interval = ((limit - idle) / 8).max(1);
        Self {
            idle,
            interval,
            count: (limit - idle).div_ceil(interval),
        }
    }
}

/// Has both connections of a link end when the host has not answered for `limit` seconds.
pub(super) fn limit(data: &TcpStream, control: SockRef<'_>, limit: u32) -> io::Result<()> {
    limit_data(data, Some(limit))?;
    end_when_silent(control, limit)
}

/// The same of a connection that carries data: of the first one or a stripe.
pub(super) fn limit_data(data: &TcpStream, limit: Option<u32>) -> io::Result<()> {
    let data = SockRef::from(data);
    // It may have had one while it was introduced.
    data.set_tcp_user_timeout(None)?;
    match limit {
        Some(limit) => probe(&data, limit),
        None => Ok(()),
    }
}

/// Has a connection over which little goes end when the host has not answered for `limit` seconds.
pub(in crate::transport) fn end_when_silent(socket: SockRef<'_>, limit: u32) -> io::Result<()> {
    probe(&socket, limit)?;
    socket.set_tcp_user_timeout(Some(Duration::from_secs(limit.into())))
}

fn probe(socket: &SockRef<'_>, limit: u32) -> io::Result<()> {
    let Probes {
        idle,
        interval,
        count,
    } = Probes::within(limit);
    let seconds = |count: u32| Duration::from_secs(count.into());
    let probes = TcpKeepalive::new()
        .with_time(seconds(idle))
        .with_interval(seconds(interval))
        .with_retries(count);
    socket.set_tcp_keepalive(&probes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_on_their_way_end_no_data_connection() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let [data, control] = [(); 2].map(|()| {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            end_when_silent(SockRef::from(&stream), 9).unwrap();
            stream
        });
        limit(&data, SockRef::from(&control), 7).unwrap();
        let stripe = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        end_when_silent(SockRef::from(&stripe), 9).unwrap();
        limit_data(&stripe, None).unwrap();
        let of = |stream| SockRef::from(stream).tcp_user_timeout().unwrap();
        assert_eq!(of(&data).unwrap_or_default(), Duration::ZERO);
        assert_eq!(of(&stripe).unwrap_or_default(), Duration::ZERO);
        assert_eq!(of(&control), Some(Duration::from_secs(7)));
    }

    #[test]
    fn the_last_probe_falls_on_the_limit() {
        assert_eq!(
            Probes::within(10),
            Probes {
                idle: 3,
                interval: 1,
                count: 7
            }
        );
        for limit in 2..=3600 {
            let Probes {
                idle,
                interval,
                count,
            } = Probes::within(limit);
            // The ranges that the kernel takes.
            assert!((1..=32_767).contains(&idle) && (1..=32_767).contains(&interval));
            assert!((1..=127).contains(&count), "{limit}");
            let last = idle + interval * count;
            assert!((limit..limit + interval).contains(&last), "{limit}");
        }
    }
}
