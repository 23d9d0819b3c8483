//! The costs of basic operations, as measured on one machine, and rounded for the others.

/// The seconds that a machine takes for each operation that collectives consist of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Of each side's time for a message inside a host.
    pub message: f64,
    /// From the end of sending until the other core sees it.
    pub latency: f64,
    /// For a core to go from one of the ranks that share it to the next.
    pub turn: f64,
    /// For a byte that is copied.
    pub copy: f64,
    /// For a byte of the accumulation type that is added to another.
    pub fold: f64,
    /// Of both sides' time for a message that is read out of the sender's memory, beside its bytes.
    pub loan: f64,
    /// Of each side's time for a message between hosts.
    pub remote_message: f64,
    /// From host to host.
    pub remote_latency: f64,
    /// For a byte through a host's network interface.
    pub remote_byte: f64,
    /// For a byte through the link between two memory nodes of a host.
    pub node_byte: f64,
    /// Bytes of the last cache of a host: no time, but beyond it memory sets the pace.
    pub cache: f64,
}

/// Steps by which costs are rounded, so that a machine measured twice makes the same choices: 2^(1/4) each.
const STEPS_PER_DOUBLING: u8 = 4;

/// 2^(i/4), as constants because `powf` is not the same everywhere.
const STEPS: [f64; STEPS_PER_DOUBLING as usize] = [
    1.0,
    1.189_207_115_002_721,
    std::f64::consts::SQRT_2,
    1.681_792_830_507_429,
];

/// A cost that is measured: what it is in units of, where it starts, and how many steps it may go.
struct Scale {
    least: f64,
    steps: u8,
}

impl Scale {
    fn value(&self, step: u8) -> f64 {
        let doublings = step / STEPS_PER_DOUBLING;
        let rest = usize::from(step % STEPS_PER_DOUBLING);
        self.least * STEPS[rest] * f64::from(1_u32 << doublings)
    }

    /// The step that is nearest to `value` in ratio; the ends of the scale for what is beyond them, and the lower one
    /// for what is no number.
    fn step(&self, value: f64) -> u8 {
        (0..self.steps)
            .find(|step| value * value < self.value(*step) * self.value(*step + 1))
            .unwrap_or(if value.is_nan() { 0 } else { self.steps })
    }
}

/// From 0.2 to 12.8 us.
const TURN: Scale = Scale {
    least: 0.2e-6,
    steps: 24,
};
/// From 64 GB/s to 0.5 GB/s.
const COPY: Scale = Scale {
    least: 1.0 / 64e9,
    steps: 28,
};
/// From 64 GB/s to 0.5 GB/s.
const FOLD: Scale = COPY;
/// From 1 MiB to 1 GiB.
const CACHE: Scale = Scale {
    least: 1_048_576.0,
    steps: 40,
};
/// From 5 us to 0.33 s.
const REMOTE_LATENCY: Scale = Scale {
    least: 5e-6,
    steps: 64,
};

/// From 200 Gbit/s to 1 Mbit/s.
const REMOTE_BYTE: Scale = Scale {
    least: 1.0 / 25e9,
    steps: 71,
};

/// The step of a rate that is not known.
const UNKNOWN: u8 = u8::MAX;

/// Bytes that a long way is taken to let through in the time of a round trip where its rate is not measured: 200 Mbit/s at
/// 40 ms. With the limits that Linux begins with, a TCP connection has four times as many under way at most.
const UNDER_WAY: f64 = (1 << 20) as f64;

/// Costs as ranks tell them to each other: steps on the scales of what is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounded {
    turn: u8,
    copy: u8,
    fold: u8,
    cache: u8,
    remote_latency: u8,
    /// [`UNKNOWN`] where it has not been measured.
    remote_byte: u8,
    /// Cores of a host, as far as they matter.
    cores: u16,
}

impl Rounded {
    /// The length of [`Self::to_bytes`].
    pub const LENGTH: usize = 8;

    /// The measured parts of `costs` and the cores of a host. A value that is out of any machine's range is brought into it.
    pub fn new(costs: &Costs, cores: usize) -> Self {
        Self {
            turn: TURN.step(costs.turn),
            copy: COPY.step(costs.copy),
            fold: FOLD.step(costs.fold),
            cache: CACHE.step(costs.cache),
            remote_latency: REMOTE_LATENCY.step(costs.remote_latency),
            remote_byte: UNKNOWN,
            cores: u16::try_from(cores).unwrap_or(u16::MAX).max(1),
        }
    }

    /// The same where `rate` bytes a second come to other hosts.
    #[must_use]
    pub fn with_rate(self, rate: f64) -> Self {
        Self {
            remote_byte: REMOTE_BYTE.step(1.0 / rate),
            ..self
        }
    }

    /// The bytes a second that come to other hosts, if that has been measured.
    pub fn rate(self) -> Option<f64> {
        (self.remote_byte != UNKNOWN).then(|| 1.0 / REMOTE_BYTE.value(self.remote_byte))
    }

    /// As bytes, for others.
    pub fn to_bytes(self) -> [u8; Self::LENGTH] {
        let [low, high] = self.cores.to_le_bytes();
        let Self {
            turn,
            copy,
            fold,
            cache,
            remote_latency,
            remote_byte,
            ..
        } = self;
        [
            turn,
            copy,
            fold,
            cache,
            remote_latency,
            remote_byte,
            low,
            high,
        ]
    }

    /// From another's bytes; `None` when they are none that [`Self::to_bytes`] makes.
    pub fn from_bytes(bytes: [u8; Self::LENGTH]) -> Option<Self> {
        let [
            turn,
            copy,
            fold,
            cache,
            remote_latency,
            remote_byte,
            low,
            high,
        ] = bytes;
        let cores = u16::from_le_bytes([low, high]);
        let within = turn <= TURN.steps
            && copy <= COPY.steps
            && fold <= FOLD.steps
            && cache <= CACHE.steps
            && remote_latency <= REMOTE_LATENCY.steps
            && (remote_byte <= REMOTE_BYTE.steps || remote_byte == UNKNOWN)
            && cores > 0;
        within.then_some(Self {
            turn,
            copy,
            fold,
            cache,
            remote_latency,
            remote_byte,
            cores,
        })
    }

    /// The costs; what is not measured is as on any machine, but that it is slow to send far.
    pub fn costs(self) -> Costs {
        let remote_latency = REMOTE_LATENCY.value(self.remote_latency);
        let bounded = 2.0 * remote_latency / UNDER_WAY;
        let typical = Costs::TYPICAL.remote_byte;
        let taken = if bounded > typical { bounded } else { typical };
        Costs {
            remote_byte: self.rate().map_or(taken, |rate| 1.0 / rate),
            remote_latency,
            turn: TURN.value(self.turn),
            copy: COPY.value(self.copy),
            fold: FOLD.value(self.fold),
            cache: CACHE.value(self.cache),
            ..Costs::TYPICAL
        }
    }

    /// Cores that the ranks of a host share.
    pub fn cores(self) -> usize {
        usize::from(self.cores)
    }
}

impl Costs {
    /// The longest [`turn`](Self::turn) that is believed.
    pub const LONGEST_TURN: f64 = 12.8e-6;

    /// Those of a machine of these days, with 10 Gbit/s between hosts.
    pub const TYPICAL: Self = Self {
        message: 0.12e-6,
        latency: 0.25e-6,
        turn: 1.5e-6,
        copy: 1.0 / 11e9,
        fold: 1.0 / 9e9,
        loan: 1.5e-6,
        remote_message: 3e-6,
        remote_latency: 20e-6,
        remote_byte: 1.0 / 1.2e9,
        node_byte: 1.0 / 40e9,
        cache: 33_554_432.0,
    };

    /// As others get to know them: see [`Rounded`].
    #[must_use]
    pub fn rounded(&self, cores: usize) -> Rounded {
        Rounded::new(self, cores)
    }
}

impl Default for Costs {
    fn default() -> Self {
        Self::TYPICAL
    }
}
