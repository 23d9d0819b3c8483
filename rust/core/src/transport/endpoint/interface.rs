//! Which of this host's IP addresses the endpoint listens on and publishes.
//!
//! The routing table knows best: a connected UDP socket (which sends nothing) tells the local address that packets
//! to a destination leave from. The destination is the rendezvous master when there is one, since all ranks reach
//! that one. Host names are the last resort: on many distributions a host's own name resolves to 127.0.1.1.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use super::address::hostname;
use crate::error::{Error, Result};

/// Addresses reserved for documentation (RFC 5737, RFC 3849): only a default route leads to them.
const ELSEWHERE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// A chosen address and why it was chosen.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) ip: IpAddr,
    pub(super) reason: String,
}

impl Choice {
    fn new(ip: IpAddr, reason: impl Into<String>) -> Self {
        Self {
            ip,
            reason: reason.into(),
        }
    }
}

/// An address of one of this host's interfaces.
struct Local {
    name: String,
    ip: IpAddr,
}

/// Chooses the address to listen on: `wanted` (an interface's name or an address) if given, else loopback where all
/// ranks are on this host, as the launcher says or a master on localhost implies, else by route.
///
/// # Errors
/// `InvalidArgument` when `wanted` is none of this host's, listing what there is.
pub(super) fn choose(
    wanted: Option<&str>,
    towards: Option<SocketAddr>,
    one_host: bool,
) -> Result<Choice> {
    if let Some(wanted) = wanted {
        return find(wanted, &locals()?);
    }
    if one_host {
        let ip = Ipv4Addr::LOCALHOST.into();
        return Ok(Choice::new(ip, "all ranks are on this host"));
    }
    if let Some(choice) = by_route(towards) {
        return Ok(choice);
    }
    for destination in ELSEWHERE {
        if let Some(ip) = route_to(SocketAddr::new(destination, 9)).filter(is_elsewhere) {
            return Ok(Choice::new(ip, "the address of the default route"));
        }
    }
    // A host without any interface that can be listed still has loopback.
    let locals = locals().unwrap_or_default();
    Ok(by_name(&locals)
        .or_else(|| by_interface(&locals))
        .unwrap_or_else(|| Choice::new(Ipv4Addr::LOCALHOST.into(), "no other address found")))
}

/// The address from which the master is reached. On the master's own host that is loopback when the master was
/// given as `localhost`, which says that all ranks are here; but also when the host's name resolves to 127.0.1.1,
/// which says nothing.
fn by_route(towards: Option<SocketAddr>) -> Option<Choice> {
    let master = towards.filter(|master| !master.ip().is_unspecified())?;
    let ip = route_to(master)?;
    let reason = format!("it leads to the master at {}", master.ip());
    if !ip.is_loopback() {
        return Some(Choice::new(ip, reason));
    }
    let localhost = [
        IpAddr::from(Ipv4Addr::LOCALHOST),
        Ipv6Addr::LOCALHOST.into(),
    ];
    localhost
        .contains(&master.ip())
        .then(|| Choice::new(ip, reason))
}

fn by_name(locals: &[Local]) -> Option<Choice> {
    let name = hostname();
    let found: Vec<SocketAddr> = (name.as_str(), 0).to_socket_addrs().ok()?.collect();
    let ip = found
        .iter()
        .map(SocketAddr::ip)
        .find(|ip| is_elsewhere(ip) && locals.iter().any(|local| local.ip == *ip))?;
    Some(Choice::new(
        ip,
        format!("the host's name {name} stands for it"),
    ))
}

fn by_interface(locals: &[Local]) -> Option<Choice> {
    let local = locals.iter().find(|local| is_elsewhere(&local.ip))?;
    let reason = format!("interface {} is the first that leaves the host", local.name);
    Some(Choice::new(local.ip, reason))
}

/// Whether other hosts could reach it without being told a scope.
fn is_elsewhere(ip: &IpAddr) -> bool {
    !ip.is_loopback() && !ip.is_unspecified() && !is_link_local(ip)
}

fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

fn find(wanted: &str, locals: &[Local]) -> Result<Choice> {
    let found = match wanted.parse::<IpAddr>() {
        Ok(ip) => locals.iter().find(|local| local.ip == ip),
        // Version 4 first: where an interface has both, everyone can reach that one.
        Err(_) => locals
            .iter()
            .filter(|local| local.name == wanted && !matches!(local.ip, IpAddr::V6(_)))
            .chain(locals.iter().filter(|local| local.name == wanted))
            .find(|local| !is_link_local(&local.ip)),
    };
    match found {
        Some(local) => Ok(Choice::new(
            local.ip,
            format!("interface {wanted:?} was asked for"),
        )),
        None => Err(Error::invalid(format!(
            "interface {wanted:?} is not one of this host: there {}",
            listing(locals)
        ))),
    }
}

fn listing(locals: &[Local]) -> String {
    let entries: Vec<String> = locals
        .iter()
        .map(|local| format!("{} ({})", local.name, local.ip))
        .collect();
    match entries.len() {
        0 => "are none".to_owned(),
        1 => format!("is {}", entries[0]),
        _ => format!("are {}", entries.join(", ")),
    }
}

fn locals() -> Result<Vec<Local>> {
    let interfaces =
        if_addrs::get_if_addrs().map_err(|cause| Error::system("list the interfaces", cause))?;
    Ok(interfaces
        .into_iter()
        .map(|interface| Local {
            ip: interface.ip(),
            name: interface.name,
        })
        .collect())
}

/// The local address that packets to `destination` leave from. Sends nothing.
fn route_to(destination: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = match destination {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(destination).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn localhost_as_master_keeps_everything_on_loopback() {
        let master = "127.0.0.1:29500".parse().unwrap();
        assert!(choose(None, Some(master), false).unwrap().ip.is_loopback());
    }

    #[test]
    fn a_host_name_that_resolves_to_loopback_says_nothing() {
        let elsewhere = choose(None, None, false).unwrap().ip;
        let master = "127.0.1.1:29500".parse().unwrap();
        assert_eq!(choose(None, Some(master), false).unwrap().ip, elsewhere);
    }

    #[test]
    fn ranks_of_one_host_keep_to_loopback_unless_an_interface_is_asked_for() {
        assert!(choose(None, None, true).unwrap().ip.is_loopback());
        let Some(other) = locals()
            .unwrap()
            .into_iter()
            .find(|it| is_elsewhere(&it.ip))
        else {
            eprintln!("skipped in part: this host has no interface but loopback");
            return;
        };
        let wanted = other.ip.to_string();
        assert_eq!(choose(Some(&wanted), None, true).unwrap().ip, other.ip);
    }

    #[test]
    fn an_interface_can_be_asked_for_by_name_and_by_address() {
        assert!(choose(Some("lo"), None, false).unwrap().ip.is_loopback());
        let ip = choose(Some("127.0.0.1"), None, false).unwrap().ip;
        assert_eq!(ip, Ipv4Addr::LOCALHOST);
    }

    #[test]
    fn an_unknown_interface_is_refused_with_those_there_are() {
        for wanted in ["eth77", "203.0.113.9"] {
            let error = choose(Some(wanted), None, false).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument);
            assert!(error.message.contains(wanted), "{error}");
            assert!(error.message.contains("lo (127.0.0.1)"), "{error}");
        }
    }

    #[test]
    fn a_destination_without_route_falls_through() {
        let master = "[2001:db8:ffff::1]:29500".parse().unwrap();
        choose(None, Some(master), false).unwrap();
    }
}
