//! Which of this host's IP addresses the endpoint listens on and publishes.
//!
//! The routing table knows best: a connected UDP socket (which sends nothing) tells the local address that packets
//! to a destination leave from. The destination is the rendezvous master when there is one, since all ranks reach
//! that one. Host names are the last resort: on many distributions a host's own name resolves to 127.0.1.1.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::Path;

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

/// Addresses that an endpoint listens on at most.
const MOST_ADDRESSES: usize = 4;

/// Which interfaces a user wants, in the way that NCCL's setting has made known: a list with commas of names (`eth0`),
/// beginnings of names (`eth`), exact names (`=eth0`) and addresses. After `^` it is a list of those not to use.
struct Wish<'a> {
    text: &'a str,
    is_exclusion: bool,
    entries: Vec<&'a str>,
}

impl<'a> Wish<'a> {
    fn parse(text: &'a str) -> Result<Self> {
        let (is_exclusion, list) = match text.strip_prefix('^') {
            Some(list) => (true, list),
            None => (false, text),
        };
        let entries: Vec<&str> = list.split(',').map(str::trim).collect();
        if entries
            .iter()
            .any(|entry| entry.trim_start_matches('=').is_empty())
        {
            return Err(Error::invalid(format!(
                "interface {text:?} is no list of names or addresses, such as eth0 or eth0,eth1 or ^docker,br-"
            )));
        }
        Ok(Self {
            text,
            is_exclusion,
            entries,
        })
    }

    /// The addresses that `entry` stands for. A name that an interface has stands for that one alone.
    fn addresses<'b>(entry: &str, locals: &'b [Local]) -> Vec<&'b Local> {
        if let Ok(ip) = entry.parse::<IpAddr>() {
            return locals.iter().filter(|local| local.ip == ip).collect();
        }
        let (name, is_exact) = match entry.strip_prefix('=') {
            Some(name) => (name, true),
            None => (entry, locals.iter().any(|local| local.name == entry)),
        };
        let fits = |local: &&Local| match is_exact {
            true => local.name == name,
            false => local.name.starts_with(name),
        };
        locals.iter().filter(fits).collect()
    }

    /// Whether `ip` may be used.
    fn allows(&self, ip: IpAddr, locals: &[Local]) -> bool {
        let listed = |entry: &&str| {
            let addresses = Self::addresses(entry, locals);
            addresses.iter().any(|local| local.ip == ip)
        };
        !self.is_exclusion || !self.entries.iter().any(listed)
    }

    /// The addresses of all that is listed, in that order, one of each interface: of version 4 where it has one, which
    /// every peer can reach.
    fn listed(&self, locals: &[Local]) -> Vec<Choice> {
        let mut names: Vec<&str> = Vec::new();
        let mut choices = Vec::new();
        for entry in &self.entries {
            let mut found = Self::addresses(entry, locals);
            found.retain(|local| !is_link_local(&local.ip));
            found.sort_by_key(|local| local.ip.is_ipv6());
            for local in found {
                if !names.contains(&local.name.as_str()) {
                    names.push(&local.name);
                    let reason = format!("interface {:?} was asked for", self.text);
                    choices.push(Choice::new(local.ip, reason));
                }
            }
        }
        choices.truncate(MOST_ADDRESSES);
        choices
    }

    fn none(&self, locals: &[Local]) -> Error {
        Error::invalid(match self.is_exclusion {
            true => format!(
                "interface {:?} leaves none of this host: there {}",
                self.text,
                listing(locals)
            ),
            false => format!(
                "interface {:?} is not one of this host: there {}",
                self.text,
                listing(locals)
            ),
        })
    }
}

/// The variables that set the interfaces of other libraries, the most important first: they are a hint where this library is
/// told nothing.
const HINTS: [&str; 2] = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"];

/// The first of these variables that is set.
pub(crate) fn hint() -> Option<Hint> {
    HINTS.into_iter().find_map(|variable| {
        let text = std::env::var(variable).ok()?;
        (!text.trim().is_empty()).then_some(Hint { variable, text })
    })
}

/// The setting of another library for its interfaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint {
    variable: &'static str,
    text: String,
}

/// Chooses the addresses to listen on, the best first: those of `wanted` if given, else loopback where all ranks are on
/// this host, as the launcher says or a master on localhost implies, else those of the `hint`, else the one that leads to
/// the master. Where nothing tells which network the others are on, the best guess comes first and further interfaces
/// follow: a peer tries one after the other.
///
/// # Errors
/// `InvalidArgument` when `wanted` is none of this host's, listing what there is.
pub(super) fn choose(
    wanted: Option<&str>,
    hint: Option<&Hint>,
    towards: Option<SocketAddr>,
    one_host: bool,
) -> Result<Vec<Choice>> {
    let wish = wanted.map(Wish::parse).transpose()?;
    if let Some(wish) = wish.as_ref().filter(|wish| !wish.is_exclusion) {
        let locals = locals()?;
        let choices = wish.listed(&locals);
        return match choices.is_empty() {
            true => Err(wish.none(&locals)),
            false => Ok(choices),
        };
    }
    if one_host {
        let ip = Ipv4Addr::LOCALHOST.into();
        return Ok(vec![Choice::new(ip, "all ranks are on this host")]);
    }
    let by_route = by_route(towards);
    if by_route
        .as_ref()
        .is_some_and(|choice| choice.ip.is_loopback())
    {
        return Ok(by_route.into_iter().collect());
    }
    // A host without any interface that can be listed still has loopback.
    let locals = locals().unwrap_or_default();
    if let Some(wish) = wish {
        let found = automatic(by_route, &locals, |ip| wish.allows(ip, &locals));
        return match found.is_empty() {
            true => Err(wish.none(&locals)),
            false => Ok(found),
        };
    }
    if let Some(hinted) = hint.and_then(|hint| follow(hint, by_route.as_ref(), &locals)) {
        return Ok(hinted);
    }
    let mut found = automatic(by_route, &locals, |_| true);
    if found.is_empty() {
        let loopback = Ipv4Addr::LOCALHOST.into();
        found.push(Choice::new(loopback, "no other address found"));
    }
    Ok(found)
}

/// Where to listen for the ranks of this host beside `choices`; `None` where these say all, since a user has listed them or
/// they are on loopback themselves.
pub(super) fn inside(wanted: Option<&str>, choices: &[Choice]) -> Option<IpAddr> {
    let is_listed = wanted.is_some_and(|wanted| !wanted.starts_with('^'));
    let is_inside = choices.iter().any(|choice| choice.ip.is_loopback());
    (!is_listed && !is_inside).then_some(Ipv4Addr::LOCALHOST.into())
}

/// The addresses that a hint leads to; none, said at info, where it is of no use here.
fn follow(hint: &Hint, by_route: Option<&Choice>, locals: &[Local]) -> Option<Vec<Choice>> {
    let wish = Wish::parse(&hint.text).ok();
    let found = match &wish {
        Some(wish) if wish.is_exclusion => {
            let by_route = by_route.map(|choice| Choice::new(choice.ip, choice.reason.clone()));
            automatic(by_route, locals, |ip| wish.allows(ip, locals))
        }
        Some(wish) => wish.listed(locals),
        None => Vec::new(),
    };
    if found.is_empty() {
        tracing::info!(
            variable = hint.variable,
            value = hint.text,
            "no interface of this host is meant: the variable is not used"
        );
        return None;
    }
    let reason = format!("{}={} was set", hint.variable, hint.text);
    let hinted = |choice: Choice| Choice::new(choice.ip, reason.clone());
    Some(found.into_iter().map(hinted).collect())
}

/// The address that leads to the master. Without one, guesses: that of the default route, that of the host's name, and
/// those of all interfaces that leave the host. Of all those that `may` be used.
fn automatic(
    by_route: Option<Choice>,
    locals: &[Local],
    may: impl Fn(IpAddr) -> bool,
) -> Vec<Choice> {
    if let Some(certain) = by_route.filter(|choice| may(choice.ip)) {
        return vec![certain];
    }
    let default = ELSEWHERE.into_iter().find_map(|ip| {
        let ip = route_to(SocketAddr::new(ip, 9)).filter(is_elsewhere)?;
        Some(Choice::new(ip, "the address of the default route"))
    });
    let mut found: Vec<Choice> = Vec::new();
    let guesses = default.into_iter().chain(by_name(locals));
    for choice in guesses.chain(by_interface(locals)) {
        if may(choice.ip) && found.iter().all(|earlier| earlier.ip != choice.ip) {
            found.push(choice);
        }
    }
    found.truncate(MOST_ADDRESSES);
    found
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

/// One address of each interface that leaves the host, of version 4 where it has one. Bridges come last: those of
/// containers and virtual machines have an address that leads no further than this host, often the same on every host.
fn by_interface(locals: &[Local]) -> Vec<Choice> {
    let mut locals: Vec<&Local> = locals
        .iter()
        .filter(|local| is_elsewhere(&local.ip) && !local.is_down())
        .collect();
    // Stable: otherwise they stay in the order of the system.
    locals.sort_by_key(|local| (local.is_bridge(), local.ip.is_ipv6()));
    let mut names: Vec<&str> = Vec::new();
    let mut found = Vec::new();
    for local in locals {
        if !names.contains(&local.name.as_str()) {
            names.push(&local.name);
            let reason = format!("interface {} leaves the host", local.name);
            found.push(Choice::new(local.ip, reason));
        }
    }
    found
}

impl Local {
    fn is_bridge(&self) -> bool {
        Path::new(SYSTEM).join(&self.name).join("bridge").exists()
    }

    fn is_down(&self) -> bool {
        let state = Path::new(SYSTEM).join(&self.name).join("operstate");
        std::fs::read_to_string(state).is_ok_and(|state| state.trim() == "down")
    }
}

/// Where Linux tells about interfaces, by their names.
const SYSTEM: &str = "/sys/class/net";

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
mod tests;
