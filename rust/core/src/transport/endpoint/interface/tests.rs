use super::*;
use crate::error::Code;
use crate::skips::skipped;

fn first(wanted: Option<&str>, towards: Option<SocketAddr>, one_host: bool) -> IpAddr {
    choose(wanted, None, towards, one_host).unwrap()[0].ip
}

fn host() -> Vec<Local> {
    let local = |name: &str, ip: &str| Local {
        name: name.to_owned(),
        ip: ip.parse().unwrap(),
    };
    vec![
        local("lo", "127.0.0.1"),
        local("docker0", "172.17.0.1"),
        local("eth0", "fe80::1"),
        local("eth0", "fd00::5"),
        local("eth0", "10.0.0.5"),
        local("eth1", "10.1.0.5"),
        local("eth10", "fd00::10"),
    ]
}

fn listed(text: &str) -> Vec<String> {
    let choices = Wish::parse(text).unwrap().listed(&host());
    choices.iter().map(|choice| choice.ip.to_string()).collect()
}

#[test]
fn localhost_as_master_keeps_everything_on_loopback() {
    let master = "127.0.0.1:29500".parse().unwrap();
    assert!(first(None, Some(master), false).is_loopback());
}

#[test]
fn a_host_name_that_resolves_to_loopback_says_nothing() {
    let elsewhere = first(None, None, false);
    let master = "127.0.1.1:29500".parse().unwrap();
    assert_eq!(first(None, Some(master), false), elsewhere);
}

#[test]
fn ranks_of_one_host_keep_to_loopback_unless_an_interface_is_asked_for() {
    assert!(first(None, None, true).is_loopback());
    let Some(other) = locals()
        .unwrap()
        .into_iter()
        .find(|it| is_elsewhere(&it.ip))
    else {
        skipped("this host has no interface but loopback");
        return;
    };
    let wanted = other.ip.to_string();
    assert_eq!(first(Some(&wanted), None, true), other.ip);
}

#[test]
fn an_interface_can_be_asked_for_by_name_and_by_address() {
    assert!(first(Some("lo"), None, false).is_loopback());
    let ip = first(Some("127.0.0.1"), None, false);
    assert_eq!(ip, Ipv4Addr::LOCALHOST);
}

#[test]
fn an_unknown_interface_is_refused_with_those_there_are() {
    for wanted in ["eth77", "203.0.113.9"] {
        let error = choose(Some(wanted), None, None, false).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.message.contains(wanted), "{error}");
        assert!(error.message.contains("lo (127.0.0.1)"), "{error}");
    }
}

#[test]
fn a_destination_without_route_falls_through() {
    let master = "[2001:db8:ffff::1]:29500".parse().unwrap();
    first(None, Some(master), false);
}

#[test]
fn a_list_names_interfaces_their_beginnings_and_addresses() {
    assert_eq!(listed("eth0"), ["10.0.0.5"]);
    assert_eq!(listed("eth1"), ["10.1.0.5"], "not eth10");
    assert_eq!(listed("eth"), ["10.0.0.5", "10.1.0.5", "fd00::10"]);
    assert_eq!(listed("=eth"), [""; 0]);
    assert_eq!(listed("eth1, eth0"), ["10.1.0.5", "10.0.0.5"]);
    assert_eq!(listed("ens5,eth1"), ["10.1.0.5"]);
    assert_eq!(listed("fd00::5,eth0"), ["fd00::5"]);
}

#[test]
fn a_guess_has_one_address_of_every_interface() {
    // No machine has interfaces of these names, so none is down or a bridge.
    let mut host = host();
    host.iter_mut()
        .for_each(|local| local.name.insert_str(0, "no-"));
    let found = by_interface(&host);
    let found: Vec<String> = found.iter().map(|choice| choice.ip.to_string()).collect();
    assert_eq!(found, ["172.17.0.1", "10.0.0.5", "10.1.0.5", "fd00::10"]);
}

#[test]
fn an_exclusion_leaves_the_others() {
    let wish = Wish::parse("^docker,=eth1,lo").unwrap();
    let host = host();
    let left = |local: &&Local| wish.allows(local.ip, &host) && !is_link_local(&local.ip);
    let left: Vec<_> = host.iter().filter(left).map(|local| &local.name).collect();
    assert_eq!(left, ["eth0", "eth0", "eth10"]);
    let found = automatic(None, &host[..2], |ip| wish.allows(ip, &host));
    assert!(
        found
            .iter()
            .all(|choice| choice.ip.to_string() != "172.17.0.1")
    );
    let all = choose(Some("^lo,e,d,w,v,b,t,u,i,g,s"), None, None, false);
    assert_eq!(all.unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn no_list_is_refused() {
    for text in ["^", "eth0,", ",", "=", "^=,lo"] {
        let error = choose(Some(text), None, None, false).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument, "{text}");
        assert!(error.message.contains("such as eth0"), "{error}");
    }
}

#[test]
fn a_hint_counts_where_it_means_an_interface() {
    let hint = |text: &str| Hint {
        variable: HINTS[0],
        text: text.to_owned(),
    };
    let follow = |text| follow(&hint(text), None, &host());
    let found = follow("eth1").unwrap();
    assert_eq!(found[0].ip.to_string(), "10.1.0.5");
    assert_eq!(found[0].reason, "GLOO_SOCKET_IFNAME=eth1 was set");
    assert!(follow("ib0").is_none());
    assert!(follow(",").is_none());
}

#[test]
fn a_hint_does_not_lead_off_this_host() {
    let hint = Hint {
        variable: HINTS[1],
        text: "e".to_owned(),
    };
    let chosen = choose(None, Some(&hint), None, true).unwrap();
    assert!(chosen[0].ip.is_loopback());
    let master = "127.0.0.1:29500".parse().unwrap();
    let chosen = choose(None, Some(&hint), Some(master), false).unwrap();
    assert!(chosen[0].ip.is_loopback());
}
