"""The physics of hockey: one step of two rackets and a puck, on floats or on tensors.

A state is 19 numbers: x, y, angle, vx, vy and omega of both rackets; x, y, vx, vy and spin of the
puck; and for how many more steps each player may keep the puck.

Every function takes ``m``, its mathematics: ``FLOATS`` for Python floats, or the torch module for
tensors. So Hockey and TorchHockey play the same game. World and timing follow the hockey-env
package: metres, 50 steps per second, the origin in the centre of the rink.

Each racket is described in its own frame: its goal is on the left, and its own x is negative. The
frame of player 1 is the rink turned by 180 degrees. The puck uses the frame of player 0. Thus a
game with swapped players is the same game, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

STEP_SECONDS = 0.02
HALF_LENGTH, HALF_WIDTH = 235 / 60, 200 / 60  # inner faces of the walls
GOAL_HALF_WIDTH = 82 / 60  # between the centre and the inner corner of a post
MOUTH = 10 / 60  # how much deeper than the walls a racket can move into its own goal
MAX_ANGLE = math.pi / 3
MAX_KEEP_STEPS = 15.0

# Rackets: half of a polygon that is symmetric about its x axis, from the front to the back.
FRONT, SIDE = 0.1, 0.4
SHOULDER, HIP, BACK = (-0.2, 0.4), (-0.36, 0.2), (-0.42, 0.0)
CENTRE_OF_MASS = -0.122375  # on the x axis; a racket rotates about it
RACKET_MASS, RACKET_INERTIA = 58.0, 3.7095
PUSH = 6000 / RACKET_MASS * STEP_SECONDS  # m/s per step at full force
TURN = 400 / RACKET_INERTIA * STEP_SECONDS  # rad/s per step at full torque
TURN_BACK = 0.1 * RACKET_MASS / RACKET_INERTIA
MAX_RACKET_SPEED = 10.0
ZONE = 0.5  # rackets bounce back this far before the centre line
BACK_LIMIT, SIDE_LIMIT = 3.5, 2.8  # no force further outwards than this

PUCK_RADIUS, PUCK_MASS, PUCK_INERTIA = 13 / 60, 1.03236, 0.0242318
MAX_PUCK_SPEED = 25.0  # strong damping above
SHOT_SPEED = 60.0
BOUNCE = 0.95
RACKET_FRICTION, WALL_FRICTION = math.sqrt(0.1), 0.1
SLOW = 1.0  # m/s; slower impacts do not bounce
SKIN, SLOP = 0.01, 0.005  # contacts begin at SKIN, resting bodies overlap by SLOP
WALL_GAP = PUCK_RADIUS - SLOP
PUCK_X, PUCK_Y = HALF_LENGTH - WALL_GAP, HALF_WIDTH - WALL_GAP
GOAL_X = 245 / 60 - PUCK_RADIUS - SKIN  # a puck beyond it is in the goal
REACH = 0.7  # further apart, racket and puck cannot touch

_NO_CONTACT = (False, (0.0,) * 5, (0.0,) * 5)


Number = Any  # a float or a tensor: what ``m`` computes with
Numbers = tuple[Number, ...]
Maths = Any  # FLOATS or the module torch; mypy cannot compare a module of overloads


class Floats:
    """The functions of torch that this module needs, for Python floats."""

    sqrt, sin, cos = math.sqrt, math.sin, math.cos

    @staticmethod
    def where(condition: bool, yes: Number, no: Number) -> Number:
        return yes if condition else no

    @staticmethod
    def clip(value: float, low: float, high: float) -> float:
        return low if value < low else high if value > high else value


FLOATS = Floats()


def advance(
    m: Maths, state: Numbers, action_0: Sequence[Number], action_1: Sequence[Number]
) -> Numbers:
    """The next state; an action is a force x, y, a torque and a shot, within [-1, 1]."""
    (x_0, y_0, a_0), (x_1, y_1, a_1) = state[:3], state[6:9]
    x, y, vx, vy, spin, keep_0, keep_1 = state[12:]
    racket_0 = _drive(m, state[:6], action_0)
    racket_1 = _drive(m, state[6:12], action_1)
    is_free_0, is_free_1 = keep_0 <= 1.0, keep_1 <= 1.0
    drag = m.where(vx * vx + vy * vy > MAX_PUCK_SPEED**2, 0.8, 0.999)

    # A racket that keeps the puck carries it, until it shoots or its time is over.
    x = m.where(is_free_0, m.where(is_free_1, x, -x_1), x_0)
    y = m.where(is_free_0, m.where(is_free_1, y, -y_1), y_0)
    vx = m.where(is_free_0, m.where(is_free_1, vx, -racket_1[0]), racket_0[0])
    vy = m.where(is_free_0, m.where(is_free_1, vy, -racket_1[1]), racket_0[1])
    shot_0, left_0 = _shot(m, keep_0, action_0[3])
    shot_1, left_1 = _shot(m, keep_1, action_1[3])
    turned_0, turned_1 = (m.cos(a_0), m.sin(a_0)), (m.cos(a_1), m.sin(a_1))
    vx_before = vx
    vx = (vx + (shot_0 * turned_0[0] - shot_1 * turned_1[0])) * drag
    vy = (vy + (shot_0 * turned_0[1] - shot_1 * turned_1[1])) * drag

    # The puck touches one racket at a time, the nearer one.
    racket_0 = (x_0, y_0, *turned_0, *racket_0[2:])
    racket_1 = (x_1, y_1, *turned_1, *racket_1[2:])
    nearer_0, nearer_1 = _nearer(x - x_0, y - y_0, x + x_1, y + y_1)
    touches, to_puck, to_racket = _NO_CONTACT
    if m is not FLOATS or nearer_0 or nearer_1:
        nearest = tuple(m.where(nearer_0, a, b) for a, b in zip(racket_0, racket_1, strict=True))
        turn = m.where(nearer_0, 1.0, m.where(nearer_1, -1.0, 0.0))  # into its frame
        puck = (turn * x, turn * y, turn * vx, turn * vy, spin)
        touches, to_puck, to_racket = _contact(m, nearest, puck)
        vx, vy, spin = vx + turn * to_puck[0], vy + turn * to_puck[1], spin + to_puck[2]
        x, y = x + turn * to_puck[3], y + turn * to_puck[4]
    # It catches a puck that does not move away from its goal.
    catch_0 = touches & nearer_0 & (keep_0 == 0.0) & (left_1 == 0.0) & (vx_before < 0.1)
    catch_1 = touches & nearer_1 & (keep_1 == 0.0) & (left_0 == 0.0) & (vx_before > -0.1)
    left_0 = m.where(catch_0, MAX_KEEP_STEPS, left_0)
    left_1 = m.where(catch_1, MAX_KEEP_STEPS, left_1)

    share_0, share_1 = m.where(nearer_0, 1.0, 0.0), m.where(nearer_1, 1.0, 0.0)
    racket_0 = _move(m, racket_0, a_0, to_racket, share_0)
    racket_1 = _move(m, racket_1, a_1, to_racket, share_1)
    puck = _bounce(m, x, y, vx, vy, spin)
    return (*_apart(m, racket_0, racket_1), *puck, left_0, left_1)


def _nearer(dx_0: Number, dy_0: Number, dx_1: Number, dy_1: Number) -> tuple[Number, Number]:
    """Whether the puck is near racket 0, and nearer than to racket 1; the same for racket 1."""
    d_0, d_1 = dx_0 * dx_0 + dy_0 * dy_0, dx_1 * dx_1 + dy_1 * dy_1
    return (d_0 < REACH * REACH) & (d_0 < d_1), (d_1 < REACH * REACH) & (d_1 < d_0)


def view_0(state: Numbers) -> Numbers:
    """The 18 numbers that player 0 observes."""
    x, y, angle, vx, vy, omega = state[6:12]
    return (*state[:6], -x, -y, angle, -vx, -vy, omega, *state[12:16], *state[17:])


def view_1(state: Numbers) -> Numbers:
    """The 18 numbers that player 1 observes, in its own frame."""
    x_0, y_0, a_0, vx_0, vy_0, w_0 = state[:6]
    x, y, vx, vy, _, keep_0, keep_1 = state[12:]
    other = (-x_0, -y_0, a_0, -vx_0, -vy_0, w_0)
    return (*state[6:12], *other, -x, -y, -vx, -vy, keep_1, keep_0)


def winner(m: Maths, state: Numbers) -> Number:
    """1.0 if the puck is in the goal of player 1, -1.0 if it is in that of player 0, else 0.0."""
    x = state[12]
    return m.where(abs(x) > GOAL_X, m.where(x > 0.0, 1.0, -1.0), 0.0)


def distance_cost(m: Maths, state: Numbers, max_steps: int) -> Number:
    """The penalty of player 0 for its distance to a puck that moves towards its goal."""
    x_0, y_0 = state[:2]
    x, y, vx = state[12:15]
    distance = m.sqrt((x_0 - x) * (x_0 - x) + (y_0 - y) * (y_0 - y))
    scale = -30.0 / (250 / 60 * max_steps / 2)
    return m.where((x < 0.0) & (vx <= 0.0), distance * scale, 0.0)


def _drive(m: Maths, racket: Numbers, action: Sequence[Number]) -> Numbers:
    """Velocities before the force, of which walls stop a part, and vx, vy, omega after it."""
    x, y, angle, vx, vy, omega = racket
    in_zone = x > -ZONE
    speed_2 = vx * vx + vy * vy
    recoil = m.where(vx > 0.0, -2.0 * vx, 0.0) - x * vx
    push_x, push_y = m.where(in_zone, recoil, action[0] * PUSH), action[1] * PUSH
    fast = speed_2 >= MAX_RACKET_SPEED**2
    after_x, after_y = vx + push_x, vy + push_y
    slower = after_x * after_x + after_y * after_y < speed_2
    is_pushed = in_zone | (speed_2 < MAX_RACKET_SPEED**2) | slower
    outwards_x = ((x < -BACK_LIMIT) & (push_x < 0.0)) | ((x > 0.0) & (push_x > 0.0))
    outwards_y = (abs(y) > SIDE_LIMIT) & (y * push_y > 0.0)
    vx = m.where(is_pushed & outwards_x, 0.0, vx)
    vy = m.where(is_pushed & outwards_y, 0.0, vy)
    after_x = m.where(is_pushed, m.where(outwards_x, 0.0, after_x), vx)
    after_y = m.where(is_pushed, m.where(outwards_y, 0.0, after_y), vy)
    drag = m.where(in_zone | fast, 0.6, 0.9)
    too_far = abs(angle) > MAX_ANGLE
    back = -TURN_BACK * (angle + m.where(angle * omega > 0.0, omega, 0.0))
    omega = omega + m.where(too_far, back, action[2] * TURN)
    omega = omega * m.where(too_far, 0.8, 0.96)
    return vx, vy, after_x * drag, after_y * drag, omega


def _shot(m: Maths, keep: Number, wish: Number) -> tuple[Number, Number]:
    """The speed of a shot, 0.0 if there is none, and the steps left to keep the puck."""
    left = m.where(keep > 1.0, keep - 1.0, 0.0)
    shoots = (left > 0.0) & ((left <= 1.0) | (wish > 0.5))
    return m.where(shoots, SHOT_SPEED, 0.0), m.where(shoots, 0.0, left)


def _contact(m: Maths, racket: Numbers, puck: Numbers) -> Numbers:
    """Whether they touch, and what it adds to vx, vy, omega, x and y of the puck and the racket."""
    x, y, c, s, vx, vy, omega = racket
    dx, dy = puck[0] - x, puck[1] - y
    # In the frame of the racket, mirrored so that the puck is on the side of positive y.
    along, across = c * dx + s * dy, c * dy - s * dx
    flip = m.where(across < 0.0, -1.0, 1.0)
    gap, nx, ny = _nearest(m, along, across * flip)
    ny = ny * flip
    arm = (gap + PUCK_RADIUS - SKIN) / 2  # from the middle of the overlap to the puck's centre
    gap = gap - PUCK_RADIUS
    arm_x = along - arm * nx - CENTRE_OF_MASS
    arm_y = across - arm * ny
    dvx, dvy = puck[2] - vx, puck[3] - vy
    slip_x = c * dvx + s * dvy + puck[4] * arm * ny + omega * arm_y
    slip_y = c * dvy - s * dvx - puck[4] * arm * nx - omega * arm_x
    speed, slip = slip_x * nx + slip_y * ny, slip_x * ny - slip_y * nx
    lever_n, lever_t = arm_x * ny - arm_y * nx, -arm_x * nx - arm_y * ny
    both = 1 / PUCK_MASS + 1 / RACKET_MASS
    stop = -speed / (both + lever_n * lever_n / RACKET_INERTIA)
    impulse = m.where(speed < -SLOW, stop * (1.0 + BOUNCE), m.where(speed < 0.0, stop, 0.0))
    rub = -slip / (both + arm * arm / PUCK_INERTIA + lever_t * lever_t / RACKET_INERTIA)
    grip = RACKET_FRICTION * impulse
    rub = m.clip(rub, -grip, grip)
    touches = gap < SKIN
    impulse, rub = m.where(touches, impulse, 0.0), m.where(touches, rub, 0.0)

    # Overlap that is left after this step is removed.
    speed_after = m.where(speed < -SLOW, -BOUNCE * speed, m.where(speed < 0.0, 0.0, speed))
    overlap = SKIN - SLOP - gap - speed_after * STEP_SECONDS
    overlap = m.where(touches & (overlap > 0.0), overlap, 0.0)
    puck_share = RACKET_MASS / (RACKET_MASS + PUCK_MASS)
    out_x, out_y = c * nx - s * ny, s * nx + c * ny
    jx, jy = impulse * nx + rub * ny, impulse * ny - rub * nx
    world_x, world_y = c * jx - s * jy, s * jx + c * jy
    to_puck = (
        world_x / PUCK_MASS,
        world_y / PUCK_MASS,
        rub * arm / PUCK_INERTIA,
        overlap * out_x * puck_share,
        overlap * out_y * puck_share,
    )
    to_racket = (
        -world_x / RACKET_MASS,
        -world_y / RACKET_MASS,
        (arm_y * jx - arm_x * jy) / RACKET_INERTIA,
        overlap * out_x * (puck_share - 1.0),
        overlap * out_y * (puck_share - 1.0),
    )
    return touches, to_puck, to_racket


def _edge(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, ...]:
    """The first corner, the outward normal and the length of an edge, counter-clockwise."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy)
    return (*start, dy / length, -dx / length, length)


CORNERS = ((FRONT, 0.0), (FRONT, SIDE), SHOULDER, HIP, BACK)
_EDGES = tuple(_edge(*pair) for pair in pairwise(CORNERS))


def _nearest(m: Maths, x: Number, y: Number) -> tuple[Number, Number, Number]:
    """Distance from the racket to a point with y >= 0, and the direction to it."""
    edge = _EDGES[0]
    best = x - FRONT
    for other in _EDGES[1:]:
        depth = (x - other[0]) * other[2] + (y - other[1]) * other[3]
        nearer = depth > best
        best = m.where(nearer, depth, best)
        edge = tuple(m.where(nearer, new, old) for new, old in zip(other, edge, strict=True))
    x_0, y_0, nx, ny, length = edge
    # The nearest point of this edge; a point beyond an end is nearest to the corner.
    dx, dy = x - x_0, y - y_0
    place = dy * nx - dx * ny
    beyond = place - m.where(place < 0.0, 0.0, m.where(place > length, length, place))
    dx, dy = best * nx - beyond * ny, best * ny + beyond * nx
    distance = m.sqrt(dx * dx + dy * dy)
    at_corner = (best > 0.0) & (beyond != 0.0) & (y > 0.0)
    scale = 1.0 / m.where(at_corner, distance, 1.0)
    return (
        m.where(at_corner, distance, best),
        m.where(at_corner, dx * scale, nx),
        m.where(at_corner, dy * scale, ny),
    )


def _bounce(m: Maths, x: Number, y: Number, vx: Number, vy: Number, spin: Number) -> Numbers:
    """Move the puck; walls and posts reflect it."""
    new_x, new_y = x + vx * STEP_SECONDS, y + vy * STEP_SECONDS
    if m is FLOATS and -PUCK_Y <= new_y <= PUCK_Y and -PUCK_X <= new_x <= PUCK_X:
        return new_x, new_y, vx, vy, spin
    # The long walls.
    side = m.where(new_y < 0.0, -1.0, 1.0)
    over = new_y * side - PUCK_Y
    hits = over > 0.0
    speed = vy * side
    rub = _rub(m, vx - spin * PUCK_RADIUS * side, speed)
    bounce = m.where(speed > SLOW, BOUNCE, 0.0)
    new_y = m.where(hits, side * (PUCK_Y - bounce * over), new_y)
    vy = m.where(hits & (speed > 0.0), -bounce * vy, vy)
    vx = vx + m.where(hits, rub, 0.0)
    spin = spin - m.where(hits, rub * side * (PUCK_MASS * PUCK_RADIUS / PUCK_INERTIA), 0.0)

    # The short walls have a goal between two posts.
    side = m.where(new_x < 0.0, -1.0, 1.0)
    over = new_x * side - PUCK_X
    crosses = over > 0.0
    speed = vx * side
    inside = speed > 0.0
    share = m.where(inside, over / m.where(inside, speed * STEP_SECONDS, 1.0), 1.0)
    share = m.clip(share, 0.0, 1.0)  # of this step, still to go when the puck reaches the wall
    cross_y = new_y - (new_y - y) * share
    at_wall = crosses & (abs(cross_y) >= GOAL_HALF_WIDTH)
    rub = _rub(m, vy + spin * PUCK_RADIUS * side, speed)
    bounce = m.where(speed > SLOW, BOUNCE, 0.0)
    wall_x = side * (PUCK_X - bounce * over)
    wall = (wall_x, new_y, m.where(inside, -bounce * vx, vx), vy + m.where(inside, rub, 0.0))
    spun = rub * side * (PUCK_MASS * PUCK_RADIUS / PUCK_INERTIA)
    wall_spin = spin + m.where(inside, spun, 0.0)
    post = _post(m, (new_x, new_y, vx, vy), cross_y, share, side)
    in_mouth = crosses & (abs(cross_y) < GOAL_HALF_WIDTH)
    x, y, vx, vy = (
        m.where(at_wall, w, m.where(in_mouth, p, free))
        for w, p, free in zip(wall, post, (new_x, new_y, vx, vy), strict=True)
    )
    return x, y, vx, vy, m.where(at_wall, wall_spin, spin)


def _rub(m: Maths, slip: Number, speed: Number) -> Number:
    """The change of the velocity along a wall by friction."""
    grip = WALL_FRICTION * speed * m.where(speed > SLOW, 1.0 + BOUNCE, 1.0)
    grip = m.where(speed > 0.0, grip, 0.0)
    ratio = 1.0 / (1.0 + PUCK_MASS * PUCK_RADIUS * PUCK_RADIUS / PUCK_INERTIA)
    return m.clip(-slip * ratio, -grip, grip)


def _post(m: Maths, puck: Numbers, cross_y: Number, share: Number, side: Number) -> Numbers:
    """The puck in the mouth of a goal, reflected if it hits the nearer post on its way."""
    x, y, vx, vy = puck
    post_y = m.where(cross_y < 0.0, -GOAL_HALF_WIDTH, GOAL_HALF_WIDTH)
    time = share * STEP_SECONDS
    dx, dy = x - vx * time - side * HALF_LENGTH, cross_y - post_y
    speed_2 = vx * vx + vy * vy + 1e-12
    towards = -(dx * vx + dy * vy)
    root_2 = towards * towards - speed_2 * (dx * dx + dy * dy - WALL_GAP * WALL_GAP)
    until = (towards - m.sqrt(m.where(root_2 > 0.0, root_2, 0.0))) / speed_2
    until = m.where(until > 0.0, until, 0.0)
    hits = (root_2 > 0.0) & (towards > 0.0) & (until < time)
    nx, ny = (dx + vx * until) / WALL_GAP, (dy + vy * until) / WALL_GAP
    away = (1.0 + BOUNCE) * (vx * nx + vy * ny)
    change_x, change_y = m.where(hits, away * nx, 0.0), m.where(hits, away * ny, 0.0)
    rest = time - until
    return x - change_x * rest, y - change_y * rest, vx - change_x, vy - change_y


def _move(m: Maths, racket: Numbers, angle: Number, hit: Numbers, share: Number) -> Numbers:
    """Move a racket; walls stop it. The last number is the reach of its front."""
    x, y, cos_before, sin_before, vx, vy, omega = racket
    vx, vy, omega = vx + share * hit[0], vy + share * hit[1], omega + share * hit[2]
    angle = angle + omega * STEP_SECONDS
    c, s = m.cos(angle), m.sin(angle)
    x = x + share * hit[3] + vx * STEP_SECONDS - CENTRE_OF_MASS * (c - cos_before)
    y = y + share * hit[4] + vy * STEP_SECONDS - CENTRE_OF_MASS * (s - sin_before)
    tilt = abs(s)
    front = FRONT * c + SIDE * tilt
    if m is FLOATS and -SIDE_LIMIT < y < SIDE_LIMIT and x > -3.4:
        return x, y, angle, vx, vy, omega, front
    # How far the racket reaches backwards, and to the sides of its raised and its lowered end.
    hip = -HIP[0] * c + HIP[1] * tilt
    shoulder = -SHOULDER[0] * c + SHOULDER[1] * tilt
    back = m.where(hip > shoulder, hip, shoulder)
    back = m.where(-BACK[0] * c > back, -BACK[0] * c, back)
    raised = FRONT * tilt + SIDE * c
    lowered, hip = -SHOULDER[0] * tilt + SHOULDER[1] * c, -HIP[0] * tilt + HIP[1] * c
    lowered = m.where(hip > lowered, hip, lowered)
    high = HALF_WIDTH - SKIN - m.where(s > 0.0, raised, lowered)
    low = m.where(s > 0.0, lowered, raised) - HALF_WIDTH + SKIN
    mouth = GOAL_HALF_WIDTH - SIDE - abs(y)
    mouth = m.where(mouth < 0.0, 0.0, m.where(mouth > MOUTH, MOUTH, mouth))
    deep = back - HALF_LENGTH + SKIN - mouth
    vy = m.where((y > high) & (vy > 0.0), 0.0, m.where((y < low) & (vy < 0.0), 0.0, vy))
    vx = m.where((x < deep) & (vx < 0.0), 0.0, vx)
    y = m.where(y > high, high, m.where(y < low, low, y))
    return m.where(x < deep, deep, x), y, angle, vx, vy, omega, front


def _apart(m: Maths, racket_0: Numbers, racket_1: Numbers) -> Numbers:
    """Both rackets, stopped and pushed apart along x where their fronts overlap."""
    x_0, y_0, a_0, vx_0, vy_0, w_0, front_0 = racket_0
    x_1, y_1, a_1, vx_1, vy_1, w_1, front_1 = racket_1
    overlap = (x_0 + x_1) + (front_0 + front_1)
    meet = (overlap > 0.0) & (abs(y_0 + y_1) < 2 * SIDE)
    closing = vx_0 + vx_1
    slower = m.where(meet & (closing > 0.0), closing / 2, 0.0)
    back = m.where(meet, overlap / 2, 0.0)
    return (
        *(x_0 - back, y_0, a_0, vx_0 - slower, vy_0, w_0),
        *(x_1 - back, y_1, a_1, vx_1 - slower, vy_1, w_1),
    )
